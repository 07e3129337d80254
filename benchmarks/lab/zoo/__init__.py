"""`coda.fuse` on models that others wrote: `python -m benchmarks.lab.zoo [--only NAME ...] [--folder FOLDER]`

Each model is brought as its authors have it: packages by pip, a pinned version each and without what it depends on;
examples that are in no package from GitHub, at a pinned commit. They lie in FOLDER, a temporary one without the option,
and nothing else is installed. Packages that a model's file imports and that its training does not call are replaced by
mocks. Each has the loss that its own trainer takes, with dropout, masks, auxiliary losses, checkpoints and constraints.

Three functions are compared: value and gradient in plain JAX, of the fused loss ("grad(fuse)"), and the fused value and
gradient ("fuse(grad)").

* At sizes of real models, some 8 x 1024 tokens in 2 layers, by shapes alone: bytes of the passes between products and
  bytes that are kept for the backward pass, by `coda.explain` for an H100, and products, fused and all.
* At small sizes in float32, compiled for the CPU: XLA's temporaries, the loss, and the distance of the gradients from
  those of plain JAX, relative, of the parameter that is furthest. Over a mesh gradients lie as their parameters do, as
  an optimizer has them; XLA would leave each where a program happens to make it, and count as a result what others have
  as a temporary.

A line ends with what is worse than plain JAX: passes, kept bytes, temporaries by more than 1 %, gradients by more than
1e-4 or an exception. Each model runs in a process of its own.

The CPU has no kernels, and XLA's form of a product with an epilogue holds more there: its sum lies in memory beside the
tile that a kernel stores alone. T5X's T5 at the small sizes holds both of its layers' gate and up, 8 arrays of 1.05 MB
in 161.2 MB where plain JAX has 159.0 to 159.5: with XLA of jax 0.12 that is 1.4 % more, without these arrays 4 % less.
"""
