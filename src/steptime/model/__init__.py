"""Models: specifications, their parameters, the catalogue of known models."""

from steptime.model.known import catalogue_names, load_catalogue_model, read_model_toml
from steptime.model.parameters import active_parameter_terms, parameter_terms
from steptime.model.spec import Experts, LatentAttention, ModelSpec, Vision

__all__ = [
    "Experts",
    "LatentAttention",
    "ModelSpec",
    "Vision",
    "active_parameter_terms",
    "catalogue_names",
    "load_catalogue_model",
    "parameter_terms",
    "read_model_toml",
]
