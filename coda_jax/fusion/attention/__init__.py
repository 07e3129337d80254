"""Attention in plain JAX: softmax(q k^T) v of a straight jaxpr becomes `coda.attention`.

axes          labels of axes: an axis is made of atoms, and two axes are the same where their atoms are
trees         operands that depend on no score, as expressions over the axes that they meet
meanings      follows a product forward: scores, maxima, exponentials, sums, probabilities, their product with values
terms         what a site's scores are made of: a scale, added terms, masks and what they put in the place of a score
linear        integers that are linear in the positions of keys; comparisons that hold on the diagonal
masks         masks as a band, intervals, ids and dense arrays; whether every row sees a key
functions     curves of scores, and what is added to them by position, as a score function
layout        which atoms are batch, rows, heads, keys; q, k and v in front of their transposes and repeats
call          the call of `coda.attention` that a site becomes, with the original's value where a row sees nothing
gradient      the backward pass of a site in a function that JAX has differentiated
in_loops      the same in a loop and its backward loop
masks_inside  masks that are made once, in the bodies that read them
cudnn         calls of cuDNN's attention, written out to be found
rule          finds the sites of a jaxpr and replaces them
"""
