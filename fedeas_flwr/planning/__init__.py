"""Compute a policy's plan from label counts before anything is generated, choose β, and compute the plan's figures.

The policies themselves are in `fedeas_flwr/policies/` and `fedeas_flwr/allocation.py`.

Other packages use `plan` and `format_table`, `read_counts`, `BudgetPath` and `bisect_last_true`, the choice of β
(`choose`, `Limits`, `Choice`, `GeneratorSpeed`), the curves, and the plan of a run-config: `planned_counts`,
`planned_allocation`, `planned_images`, `stored_images`, `requested_images`, `count_distinct_images`,
`empty_plan_message`.
"""
