"""`ddl doctor`: what is installed, which kernels run where, what is wrong and how to fix it.

Every probe runs on its own, and one that fails becomes a line of the report: a broken installation
is what the command is for.
"""
