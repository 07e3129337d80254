"""Jaxprs: walked, bound again, seen as graphs, split at what a loop repeats."""
