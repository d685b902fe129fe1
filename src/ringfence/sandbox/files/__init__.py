"""Files of boxes from the supervisor's side: paths, trees, archives, and what may be taken out or must stay."""
