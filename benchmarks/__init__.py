"""Scripts behind the README's figures; they need the checkout."""
