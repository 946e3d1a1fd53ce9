"""The paper's tables and figures, made from runs, with the paper's numbers next to ours.

Only `commands/` uses it.

paper.py             the numbers that the paper printed
cells.py             every cell of its tables, a column and a method, and the run-config it means
results.py           the runs of each cell, found by their configs, and what they measured
paper_comparison.py  a number of the paper next to ours, and how both are written
tables.py            the paper's tables
extra_tables.py      the numbers of its text, and comparisons that it does not have
claims.py            its comparisons as claims, each with our difference and a verdict
drops.py             rounds whose accuracy drops, counted over all runs
sweep_tables.py      recorded sweeps over partitions
figures.py           the paper's figures
items.py             every table and figure by name, and the cells it needs
sections.py          the tables and figures of one command, each with its missing runs
page.py              these as one page in Markdown and HTML, and places for tables in another document
inline_numbers.py    numbers inside the sentences of another document
summary.py           the page's head, JSON, CSV, the terminal's output, and filled documents
missing_runs.py      runs the missing cells as a sweep, and exports their records
"""
