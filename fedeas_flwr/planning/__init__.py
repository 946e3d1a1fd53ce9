"""What would be generated, computed before anything is.

Other rooms use `plan` and `format_table`, `read_counts`, `BudgetPath` and `greatest`, the choice of β (`choose`,
`Limits`, `Choice`, `Speed`), the curves, and what a run-config plans: `planned_counts`, `planned_allocation`,
`planned_images`, `asked_images`, `different_images`, `partition_counts`, `nothing_planned`.
"""
