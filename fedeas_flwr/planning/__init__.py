"""Compute how many images each client will generate, before any is generated, and choose β.

Other packages use `plan` and `format_table`, `read_counts`, `BudgetPath` and `bisect_last_true`, the choice of β
(`choose`, `Limits`, `Choice`, `GeneratorSpeed`), the curves, and the plan of a run-config: `planned_counts`,
`planned_allocation`, `planned_images`, `requested_images`, `count_distinct_images`, `partition_counts`,
`empty_plan_message`.
"""
