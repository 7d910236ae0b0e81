""" What timm's model zoo lacks """
from .feature_map import FeatureMap, check_consistency, describe_features
from .head import classifier_parameters, freeze_batch_norm, init_classifier, mean_prior_bias, prior_bias
from .pooling import create_model, is_max_pooled
from .shufflenetv2 import ShuffleNetV2

__all__ = [
    'FeatureMap',
    'ShuffleNetV2',
    'check_consistency',
    'classifier_parameters',
    'create_model',
    'describe_features',
    'freeze_batch_norm',
    'init_classifier',
    'is_max_pooled',
    'mean_prior_bias',
    'prior_bias',
]
