"""The head under a loss: what a projection's logits sum up to, a chunk of tokens at a time, and two operators of it.

`arguments` makes a `LossHead` and its `arrays` of an operator's arguments; `statistics` makes its sums differentiable
functions on any mesh. `loss_head` has the algebra; `exponential_head` and `entropy_head` spare a pass over the logits.
"""
