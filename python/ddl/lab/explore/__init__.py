"""`ddl explore`: a terminal screen of training runs, live while they train.

watching.py reads the files, in another thread than the screen; screen.py shows what it has read.
The modules between turn a run into text and need no screen.
"""
