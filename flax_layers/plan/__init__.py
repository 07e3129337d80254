"""A model's products, collectives and memory on a mesh, from its sizes alone: `plan_costs`.

costs   `plan_costs`, and `PlanCosts`, which prints
steps   the products and collectives of a layer and of the loss's head
memory  what a device holds at once
plot    a layer's products and collectives in time
"""

from flax_layers.plan.costs import PlanCosts as PlanCosts
from flax_layers.plan.costs import plan_costs as plan_costs
