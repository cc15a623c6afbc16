// Shows the service's OpenAPI description. Paths are relative: the service may be mounted under a prefix.

SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
