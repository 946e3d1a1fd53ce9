"""Compare runs in tables, figures and pages. This package trains nothing and imports neither torch nor flwr."""
