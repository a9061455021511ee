"""Complete programs on `ls_strategy`: one folder each, one base configuration each, small overlays on top."""
