"""Compare runs in tables, figures and pages. This package trains nothing and imports neither torch nor flwr.

Other packages use `group_runs`, `notes_on`, `as_data`, `write_report`, `print_comparison`, `comparison_figure`,
`page.py`, `plan_figures.py` and `style.py`.
"""
