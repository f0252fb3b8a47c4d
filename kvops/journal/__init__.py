"""Reading what the router and the engines wrote about each request, and joining it."""
