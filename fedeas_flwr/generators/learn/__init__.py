"""Train diffusion models, which then serve as generators."""
