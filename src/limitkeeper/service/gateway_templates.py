"""The texts of gateway_config.py: configurations of nginx, Caddy and Envoy with a `<<name>>` for each value."""

NGINX_MAP = """\
# Paths that a rule matches, and unusual spellings (%2e, //, ;), are asked about; others pass.
map $request_uri $limitkeeper_asks {
    default 1;
    <<limited>>
    "~^<<plain>>(?:\\?|$)" "";
}
"""

NGINX = """\
# nginx asks limitkeeper about requests. Written by: limitkeeper policy export nginx (policy '<<policy>>')
events {}

http {
    upstream limitkeeper {
        server <<service>>;
        keepalive 64;
    }
    upstream application {
        server <<application>>;
        keepalive 64;
    }
    <<asks>>
    server {
        listen <<listen>>;

        location / {
            auth_request /_limitkeeper;
            <<set>>
            auth_request_set $limitkeeper_status $upstream_http_x_limitkeeper_status;
            error_page 403 = @limited;   # only that of auth_request: the application's own 403 stays
            <<add>>
            proxy_pass http://application;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $remote_addr;   # behind a CDN: set_real_ip_from and real_ip_header
        }

        location = /_limitkeeper {
            internal;
            <<skip>>
            proxy_pass http://limitkeeper/auth?deny=403;
            proxy_http_version 1.1;
            <<headers>>
            proxy_set_header Connection "";
            proxy_pass_request_body off;
            proxy_set_header Content-Length "";
            proxy_set_header X-Forwarded-Method $request_method;
            proxy_set_header X-Forwarded-Uri $request_uri;
            proxy_set_header X-Forwarded-Host $host;
            proxy_set_header <<address>> $remote_addr;
            proxy_set_header X-Limitkeeper-Token "";   # the service's token, if it has one
            proxy_connect_timeout 100ms;
            proxy_read_timeout <<timeout>>;
            proxy_intercept_errors on;
            <<down>>
        }

        location @limitkeeper_down { return 204; }

        location @limited {
            default_type application/json;
            <<retry>>
            <<add>>
            add_header Cache-Control no-store always;
            if ($limitkeeper_status = 503) { return 503 '<<unavailable>>\\n'; }
            return 429 '<<refused>>\\n';
        }
    }
}
"""

CADDY_ROUTES = """\
# Paths that a rule matches, and unusual spellings (%2e, //, ;), are asked about; others pass.
@limited vars_regexp {http.request.orig_uri} "(?i)^(?:<<limited>>)(?:\\?|$)"
@plain vars_regexp {http.request.orig_uri} "^<<plain>>(?:\\?|$)"
handle @limited {
	import limited
}
handle @plain {
	reverse_proxy <<application>>
}
handle {
	import limited
}"""

CADDY_SUCCESS = """\
@counted {
	status 200
	header <<shown>> *
}
handle_response @counted {
	vars limitkeeper_answered yes
	<<fields>>
}"""

CADDY_DOWN = """\
# The service is down or late: let requests pass.
handle_errors {
	@unanswered not vars limitkeeper_answered yes
	reverse_proxy @unanswered <<application>>
}"""

CADDY = """\
# Caddy asks limitkeeper about requests. Written by: limitkeeper policy export caddy (policy '<<policy>>')
{
	admin off
	auto_https off
}

(limited) {
	reverse_proxy <<service>> {
		method GET
		rewrite /auth?
		<<headers>>
		header_up X-Forwarded-Method {method}
		header_up X-Forwarded-Uri {http.request.orig_uri}
		header_up X-Forwarded-Host {host}
		header_up <<address>> {client_ip}
		header_up X-Limitkeeper-Token "{env.LIMITKEEPER_TOKEN}"
		transport http {
			dial_timeout 100ms
			response_header_timeout <<timeout>>
		}
		<<success>>
		@allowed status 200
		handle_response @allowed {
			vars limitkeeper_answered yes
		}
	}
	reverse_proxy <<application>>
}

http://:<<listen_port>> {
	bind <<listen_host>>
	route {
		# A client names headers in Connection that Caddy then keeps from the application, though the service has seen them.
		@upgrade header Upgrade *
		@ordinary not header Upgrade *
		request_header @upgrade Connection Upgrade
		request_header @ordinary -Connection
		<<routes>>
	}
	<<down>>
}
"""

ENVOY_ROUTES = """\
# Paths that a rule matches, and unusual spellings (%2e, //, ;), are asked about; others pass.
- match: {safe_regex: {regex: <<limited>>}}
  route: {cluster: application}
- match: {safe_regex: {regex: <<plain>>}}
  route: {cluster: application}
  typed_per_filter_config:
    envoy.filters.http.ext_authz:
      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute
      disabled: true"""

ENVOY_NAMED = """\
type: STRICT_DNS
dns_lookup_family: V4_PREFERRED"""

ENVOY = """\
# Envoy asks limitkeeper about requests. Written by: limitkeeper policy export envoy (policy '<<policy>>')
layered_runtime:
  layers:
    - name: paths
      static_layer: {re2.max_program_size.error_level: 1000000}   # of the pattern of all limited paths; Envoy's default is 100
static_resources:
  listeners:
    - name: gateway
      address: {socket_address: {address: "<<listen_host>>", port_value: <<listen_port>>}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: gateway
                use_remote_address: true   # behind a CDN: also xff_num_trusted_hops
                http_filters:
                  - name: envoy.filters.http.ext_authz
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthz
                      transport_api_version: V3
                      failure_mode_allow: <<allow>>
                      status_on_error: {code: ServiceUnavailable}
                      allowed_headers:
                        patterns:
                          <<headers>>
                      http_service:
                        server_uri: {uri: "http://<<service>>", cluster: limitkeeper, timeout: <<timeout_s>>}
                        path_prefix: /auth/path
                        authorization_request:
                          headers_to_add:
                            - {key: <<address>>, value: "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"}
                            - {key: x-limitkeeper-token, value: ""}   # the service's token, if it has one
                        authorization_response:
                          allowed_client_headers_on_success:
                            patterns:
                              <<fields>>
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                route_config:
                  virtual_hosts:
                    - name: all
                      domains: ["*"]
                      routes:
                        <<routes>>
                        - match: {prefix: /}
                          route: {cluster: application}
  clusters:
    - name: limitkeeper
      <<service_type>>
      connect_timeout: 0.1s
      load_assignment:
        cluster_name: limitkeeper
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: "<<service_host>>", port_value: <<service_port>>}}}
    - name: application
      <<application_type>>
      connect_timeout: 1s
      load_assignment:
        cluster_name: application
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: "<<application_host>>", port_value: <<application_port>>}}}
"""
