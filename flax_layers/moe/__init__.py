"""Mixtures of experts: the layer, its router, the order of rows by expert, and how evenly experts are used."""

from flax_layers.moe.balancing import RouterStatistics, load_balancing_loss, router_statistics, router_z_loss
from flax_layers.moe.experts import Experts
from flax_layers.moe.moe import MoE
from flax_layers.moe.router import BalanceBias, Router, Routing, route, update_balance_bias
from flax_layers.moe.routing import Order, combined, gathered, order_by_expert, sorted_experts

__all__ = [
    "BalanceBias",
    "Experts",
    "MoE",
    "Order",
    "Router",
    "RouterStatistics",
    "Routing",
    "combined",
    "gathered",
    "load_balancing_loss",
    "order_by_expert",
    "route",
    "router_statistics",
    "router_z_loss",
    "sorted_experts",
    "update_balance_bias",
]
