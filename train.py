#!/usr/bin/env python3
""" Train a timm model on multi-label images: python train.py --help """
from timm_splicemix.train import main

if __name__ == '__main__':
    main()
