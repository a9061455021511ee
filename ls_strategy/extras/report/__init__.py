"""One HTML file about one run or several: what ``ls-strategy report`` reads, and what it draws.

::

    find      folders with logs          events_file, csv_file, run_file    their contents, as far as they are whole
    run       one run, read once         events     restarts, skipped steps, what is not a number
    charts    SVG with axes and units    panels     which chart shows which scalars
    page      the file                   style      how it looks, in light, in dark and on paper

Needs neither torch nor Lightning. Texts from files are escaped where they become HTML, in `markup`.
"""
