"""Losses over a vocabulary in plain JAX: what is made of logits becomes a loss head, in chunks of tokens.

logits         products whose results are logits, and what is made of them before a loss
token_sums     sums over tokens, with weights and masks
row_factors    factors of a token's numbers, moved behind what is made of logits
row_views      slices and reshapes of rows, moved in front of it
stops          stopped gradients, moved behind it
whole_logits   losses in sight: these moves together; why logits stay whole
loss           finds losses that are written in the usual ways
row_losses     losses of any other form, a function of each row of logits
row_gradients  the same where JAX has differentiated them
loss_gradient  a loss beside its gradient, in a function that JAX has differentiated
wide           arrays over a vocabulary as sums of five
shifts         how these depend on the largest logit
ends           the products in which the derivative of logits ends
token_chunks   a loss that is evaluated on some tokens at a time
"""
