"""The head under a loss: sums over a projection's logits, a chunk of tokens at a time, and the two operators with it.

`arguments` makes a `LossHead` and its `arrays` from an operator's arguments; `statistics` makes its sums differentiable
functions on any mesh. `loss_head` has the algebra; `exponential_head` and `entropy_head` save a pass over the logits.
"""
