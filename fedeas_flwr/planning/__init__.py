"""What would be generated, computed before anything is.

Other rooms use `plan` and `format_table`, `read_counts`, `BudgetPath` and `bisect_last_true`, the choice of β
(`choose`, `Limits`, `Choice`, `GeneratorSpeed`), the curves, and what a run-config plans: `planned_counts`,
`planned_allocation`, `planned_images`, `requested_images`, `count_distinct_images`, `partition_counts`,
`empty_plan_message`.
"""
