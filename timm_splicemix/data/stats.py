""" Old name of `timm_splicemix.stats`, kept until 0.3 """
from ..stats import main

if __name__ == '__main__':
    main()
