"""A client's network, its local training, and the evaluation of models.

Other packages use `build.py` (networks, training configs, engines and their pool), `Engine`, `State`, `copy_state` and
`read_state` of `engine.py`, `objective.py`, `Evaluator`, `central_test` and `Evaluate` of `evaluation.py`, and
`build_model`, `split_state`, `imagenet_file` and `Normaliser` of `models.py`. Only `build.py` imports `gpu/`.
"""
