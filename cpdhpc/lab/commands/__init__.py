"""Commands with options and output of their own, a file each: above all other rooms."""
