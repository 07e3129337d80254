"""The documentation's tools beside Sphinx: executed blocks, the table of operators, drawings, outputs of a GPU."""
