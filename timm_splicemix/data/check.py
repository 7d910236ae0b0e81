""" Old name of `timm_splicemix.check`, kept until 0.3 """
from ..check import main

if __name__ == '__main__':
    main()
