"""Names under which the extension module and the program find functions of the rooms. Python imports none of them."""
