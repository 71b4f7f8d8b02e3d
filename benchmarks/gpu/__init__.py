"""Everything that is measured on a GPU. day.sh runs it; day.py lists the parts."""
