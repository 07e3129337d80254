"""Tools for jaxprs: walking and evaluating them, graphs of their operations, and hoisting out of loops."""
