"""The epilogue language: JAX functions of whole arrays that a tile of a product computes by itself, and their CUDA.

From a function to a kernel's epilogue, in order:
  user_code     traces it with 32-bit types, and says what Python cannot ask of a tracer; call_site says at which line
  flatten       makes one list of equations of the jaxpr, and hoists captured arrays; logsumexp recognises its pattern,
                and so whole_maximum does
  analysis      translates equations to nodes for one element, with the rules of axis_rules, column_rules, reductions
                and elementwise; tags say what indexes each axis, values holds what is known of a value
  operand       is an array beside acc, and what is asked of its kind; operand_kinds has all that is known of each kind,
                for this room and those above it; groups is of arrays of which a row's group chooses
  saturate, contraction_order  are functions that epilogues know by name, beside logsumexp
  group_reductions  are reductions over the rows of each group, which XLA makes from values of each row
  finishing     leaves to XLA what follows from finished reductions
  simplify      shortens the nodes; assemble numbers them and makes the program
  program       is the data model; evaluate runs it with XLA; code_size estimates its instructions; linearity says
                whether its results may be summed over devices
  emit          writes its CUDA
  dtypes        is the table of dtypes that all of them read
trace is the way in: it calls all of these but those from program on.
"""

from coda_jax.epilogue.code_size import instructions as instructions
from coda_jax.epilogue.contraction_order import contraction_order as contraction_order
from coda_jax.epilogue.emit import emit as emit
from coda_jax.epilogue.evaluate import evaluate as evaluate
from coda_jax.epilogue.evaluate import evaluate_tiles as evaluate_tiles
from coda_jax.epilogue.evaluate import finish as finish
from coda_jax.epilogue.groups import ByGroup as ByGroup
from coda_jax.epilogue.halves import Halves as Halves
from coda_jax.epilogue.halves import Width as Width
from coda_jax.epilogue.linearity import is_linear as is_linear
from coda_jax.epilogue.logsumexp import logsumexp as logsumexp
from coda_jax.epilogue.operand import Along as Along
from coda_jax.epilogue.operand import Operand as Operand
from coda_jax.epilogue.program import Axis as Axis
from coda_jax.epilogue.program import Program as Program
from coda_jax.epilogue.program import Reduction as Reduction
from coda_jax.epilogue.program import ReductionOp as ReductionOp
from coda_jax.epilogue.program import TileStore as TileStore
from coda_jax.epilogue.saturate import saturate as saturate
from coda_jax.epilogue.trace import Epilogue as Epilogue
from coda_jax.epilogue.trace import trace as trace
from coda_jax.epilogue.trace import types_of as types_of
from coda_jax.epilogue.values import NotTileLocalError as NotTileLocalError
