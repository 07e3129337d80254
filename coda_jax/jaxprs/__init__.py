"""Tools for jaxprs: walking, inlining and evaluating them, their definitions and uses, graphs of them, hoisting."""
