"""From files of results to tables, figures and one page."""
