"""The epilogue language: JAX functions that a tile of a product can compute from its own elements, and their CUDA.

From a function to a kernel's epilogue, in order:
  user_code     traces the function with 32-bit types, and explains why Python cannot use a tracer's value; call_site
                finds the user's line
  flatten       inlines the jaxpr into one list of equations, and hoists captured arrays; logsumexp and whole_maximum
                replace patterns in it
  analysis      translates equations to nodes for one element, with the rules of axis_rules, column_rules, reductions
                and elementwise; tags say what indexes each axis; values has the classes of values; elements makes the
                nodes, here and of attention's scores
  operand       describes an array beside acc; operand_kinds defines each kind, for this package and those that import
                it; groups has operands with an entry for each group of rows
  saturate, contraction_order  are functions that epilogues know by name, beside logsumexp
  random_bits   has the bits of an element that dropout goes by
  group_reductions  reduces over the rows of each group, by XLA, from values of each row
  finishing     collects the equations over finished reductions, which XLA runs after the kernel
  simplify      shortens the nodes; assemble numbers them and makes the program
  program       is the data model; evaluate runs it with XLA; code_size estimates its instructions; linearity says
                whether its results may be summed over devices
  emit          writes its CUDA
  dtypes        is the table of dtypes that all of them read
trace is the entry point: it calls all of these but those from program on.
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
from coda_jax.epilogue.operand_kinds import tile_operand as tile_operand
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
