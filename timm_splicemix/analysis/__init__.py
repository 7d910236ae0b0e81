""" The analyses of the paper, each a command that reads what training and evaluation wrote """
