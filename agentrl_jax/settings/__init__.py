"""Settings: frozen dataclasses that declare each field's type, bounds, default and meaning.

marks   what Annotated adds to a field's type
tree    from dataclasses to the ConfigDict that users change, and back
pages   --show_config and the tables of fields, from the fields' comments
"""
