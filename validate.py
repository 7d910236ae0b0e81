#!/usr/bin/env python3
""" Score a model on multi-label images: python validate.py --help """
from timm_splicemix.validate import main

if __name__ == '__main__':
    main()
