"""One HTML file about one run or several: what ``ls-strategy report`` reads, and what it draws.

::

    find      folders with logs          events_file, csv_file, run_file    their contents, as far as they are whole
    run       one run, read once         events     restarts, skipped steps, what is not a number
    charts    figures by matplotlib      panels     which chart shows which scalars
    page      the file                   templates  its HTML, and its look in light, in dark and on paper

Needs neither torch nor Lightning. Jinja escapes texts from files where they become HTML, and matplotlib in figures.
"""
