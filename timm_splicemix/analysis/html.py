""" Old name of `timm_splicemix.report`, kept until 0.3 """
from ..report import main

if __name__ == '__main__':
    main()
