"""The paper's tables and figures from run directories, its numbers beside ours.

paper.py     what the paper published
cells.py     every number's run: a column, a method, their run-config
measured.py  the runs of a cell, found by what their configs mean, and what they measured
beside.py    a number of the paper beside ours, and how the two are written
tables.py    the paper's tables
beyond.py    the numbers of its text, and our questions to it
claims.py    the paper's comparisons, and whether our runs agree
drops.py     rounds whose accuracy drops, counted over all runs
figures.py   the figures
samples.py   images of the generator for one of them
items.py     every table and figure by name
sections.py  those that were asked for, made
page.py      one page of all of it, as Markdown and as HTML
summary.py   the page's head, JSON, CSV, the terminal, tables for another document
inline_numbers.py  numbers inside sentences of a document
sweep_tables.py    recorded sweeps over partitions
filling.py   the runs that are missing, done as a sweep
"""
