""" Models: max pooling and feature maps for all families of timm, the classifier, ShuffleNetV2 """
from .classifier import (
    classifier_parameters,
    freeze_batch_norm,
    init_classifier,
    mean_prior_bias,
    prior_bias,
)
from .create import check_model_name, create_model
from .feature_map import FeatureMap, check_consistency, describe_features
from .pooling import is_max_pooled
from .shufflenetv2 import ShuffleNetV2
from .with_head import HEAD_PREFIX, has_head

__all__ = [
    'HEAD_PREFIX',
    'FeatureMap',
    'ShuffleNetV2',
    'check_consistency',
    'check_model_name',
    'classifier_parameters',
    'create_model',
    'describe_features',
    'freeze_batch_norm',
    'has_head',
    'init_classifier',
    'is_max_pooled',
    'mean_prior_bias',
    'prior_bias',
]
