"""Generators of synthetic images: open, train and serve them, check their images, and cache the images.

Other packages use the interface (`Generator`, `SampleId`, `batch_size`, `images_per_class`, `describe_generator`,
`LazyGenerator`), `opening.py` (`open_generator`, `open_for_run`, `check_for_run`, `generator_warning`,
`hash_input_files`), `ImageCache` and its maintenance, `fill.py`, a client's images (`local_images`), the generator of a
process or a run (`own_generator`, `start_service`, `reserve_generator_gpu`), `independent_classifier`,
`quality_report`, `check_bank_size`, `DiffusionGenerator` and `diffusion/model_folder.py`, `learn.run.train_generator`,
`learn/builtin.py` and `audit/`.
"""

from fedeas_flwr.generators.interface import Generator, SampleId

__all__ = ["Generator", "SampleId"]
