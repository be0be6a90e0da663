"""Settings: frozen dataclasses whose fields say type, bound or choice, default and meaning.

marks   what Annotated says of a field beside its type
tree    from dataclasses to the ConfigDict that users change, and back
pages   --show_config and the tables of fields, from the comments beside them
"""
