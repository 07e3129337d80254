"""The head under a loss: what a projection's logits sum up to, a chunk of tokens at a time, and two operators of it.

`arguments` makes a `LossHead` and its `arrays` of an operator's arguments; `statistics` makes its sums differentiable
functions on any mesh:

    statistics     of `token_logprobs`, and of a loss of each token: keeps x, W and the sums, and makes the logits again
                   in its backward pass: four products a chunk
    weighted_sum   of a mean or a sum of losses, whose cotangent is a number: the forward pass forms the gradients while
                   a chunk's logits are there, and keeps these: three products a chunk

`loss_head` has the algebra, of `arrays` and, in `chunks`, of some of their rows; the heads of `shifted_heads` spare a
pass over the logits. `row_function` runs a head on each device's rows where XLA's partitioner shards them. `any_label`
has what `coda.fuse` asks for.
"""
