"""The paper's tables and figures from run directories, its numbers beside ours.

paper.py     what the paper published
cells.py     every number's run: a column, a method, their run-config
measured.py  the runs of a cell, found by what their configs mean, and what they measured
tables.py    the tables
figures.py   the figures
items.py     every table and figure by name
page.py      one page of all of it, as Markdown and as HTML
filling.py   the runs that are missing, done as a sweep
"""
