"""Small products: requests answered on the connection itself, without ASGI."""
