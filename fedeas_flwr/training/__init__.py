"""A client's network, its training steps, and its test.

Other rooms use `build.py` (networks, recipes, engines and their pool), `Engine`, `State`, `copy_state` and
`read_state` of `engine.py`, `objective.py`, `Evaluator`, `central_test` and `Evaluate` of `evaluation.py`, and
`build_model`, `split_state`, `imagenet_file` and `Normaliser` of `models.py`. Only `build.py` imports `gpu/`.
"""
