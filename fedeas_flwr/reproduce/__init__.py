"""The paper's tables and figures, made from runs, with the paper's numbers next to ours.

Only `commands/` uses it.

paper.py             what the paper published
cells.py             the run-config behind every number: a column and a method
results.py           the runs of a cell, found by their configs, and what they measured
paper_comparison.py  a number of the paper and ours, and how both are written
tables.py            the paper's tables
extra_tables.py      the numbers of its text, and further comparisons
figures.py           the figures
items.py             every table and figure by name
sections.py          the tables and figures that were asked for
page.py              all of them as one page, in Markdown and HTML
summary.py           the page's head, JSON, CSV, the terminal, tables for another document
missing_runs.py      the runs that are missing, done as a sweep
"""
