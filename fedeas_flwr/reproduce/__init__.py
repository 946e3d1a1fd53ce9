"""The paper's tables and figures, made from runs, with the paper's numbers next to ours.

Only `commands/` uses this package.

paper.py             the numbers that the paper printed
cells.py             the cells of its tables (a column and a method each) and their run-configs
results.py           the runs of each cell, found by their configs, and their measurements
paper_comparison.py  a number of the paper next to ours, and the format of both
tables.py            the paper's tables
extra_tables.py      the numbers in its text, comparisons that the paper does not have, and recorded sweeps
claims.py            the paper's comparisons as claims, each with our difference and a verdict
drops.py             rounds whose accuracy drops, counted over all runs
figures.py           the paper's figures
items.py             every table and figure by name, and the cells it needs
sections.py          the sections of the page: one per table or figure, each with its missing runs
summary.py           the sections as one page, JSON, CSV and terminal output
documents.py         tables and numbers inserted into another document
missing_runs.py      runs the missing cells as a sweep, and exports their records
"""
