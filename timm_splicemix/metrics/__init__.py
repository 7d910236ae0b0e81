""" Metrics, the meters that accumulate them, and thresholds """
from .functional import average_precision, multilabel_metrics
from .multilabel import MultilabelMeter
from .preset import PRESETS, Preset
from .single_label import AccuracyMeter, AveragingMeter
from .thresholds import (
    Thresholds,
    describe_tuning,
    load_thresholds,
    parse_thresholds,
    parse_thresholds_content,
    save_thresholds,
    thresholds_content,
    tune_thresholds,
)

__all__ = [
    'PRESETS',
    'AccuracyMeter',
    'AveragingMeter',
    'MultilabelMeter',
    'Preset',
    'Thresholds',
    'average_precision',
    'describe_tuning',
    'load_thresholds',
    'multilabel_metrics',
    'parse_thresholds',
    'parse_thresholds_content',
    'save_thresholds',
    'thresholds_content',
    'tune_thresholds',
]
