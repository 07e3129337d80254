"""The epilogue language: JAX functions of whole arrays that a tile of a product computes by itself, and their CUDA."""

from coda_jax.epilogue.code_size import instructions as instructions
from coda_jax.epilogue.emit import emit as emit
from coda_jax.epilogue.logsumexp import logsumexp as logsumexp
from coda_jax.epilogue.program import Axis as Axis
from coda_jax.epilogue.program import Kind as Kind
from coda_jax.epilogue.program import Operand as Operand
from coda_jax.epilogue.program import Program as Program
from coda_jax.epilogue.program import Reduction as Reduction
from coda_jax.epilogue.program import ReductionOp as ReductionOp
from coda_jax.epilogue.program import TileStore as TileStore
from coda_jax.epilogue.program import Width as Width
from coda_jax.epilogue.trace import Epilogue as Epilogue
from coda_jax.epilogue.trace import trace as trace
from coda_jax.epilogue.trace import types_of as types_of
from coda_jax.epilogue.values import NotTileLocalError as NotTileLocalError
